"""What tests of several folders share; what one folder alone needs is in that folder."""
