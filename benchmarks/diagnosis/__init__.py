"""What the doctor says of heads in which something was planted, and of sound ones."""
