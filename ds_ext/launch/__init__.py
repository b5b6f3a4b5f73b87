"""How a rank starts: the roll call that compares jobs before the first step."""
