"""One forward pass on each side of a run, the trainer's and the engine's, with what every module gave."""
