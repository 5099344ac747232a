"""Where a writer's changes of a lake table are until they are published (``lake.publish``)."""
