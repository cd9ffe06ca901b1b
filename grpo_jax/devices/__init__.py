"""Devices: meshes and the layout of a train step."""
