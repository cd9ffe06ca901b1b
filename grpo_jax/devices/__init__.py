"""Which device does what: meshes, processes, memory."""
