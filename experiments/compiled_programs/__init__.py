"""What a GPU or a TPU executes in a train step, read from programs that are compiled without having one."""
