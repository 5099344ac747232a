"""The files of infra/, as far as they can be tried without containers or a cloud."""
