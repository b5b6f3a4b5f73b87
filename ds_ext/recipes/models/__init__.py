"""Models as lists of DeepSpeed layer specs."""
