"""What one peer trains, without a network: gradients, optimizer, schedule, options, and the state of them all."""
