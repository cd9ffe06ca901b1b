"""Devices: meshes, processes and memory."""
