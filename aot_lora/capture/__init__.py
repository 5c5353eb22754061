"""Recording what a program compiles, whatever program it is, and comparing that with a lock."""
