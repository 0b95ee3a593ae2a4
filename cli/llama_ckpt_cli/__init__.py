"""The command `llama-ckpt`: parse, call one library function, hand the value to the one output."""
