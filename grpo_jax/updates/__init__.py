"""From a trajectory to new parameters: batch, loss, minibatches, epochs."""
