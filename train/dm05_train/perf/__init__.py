"""Speed, applied to a built model by one function a switch; the model reads the same with all of it deleted."""
