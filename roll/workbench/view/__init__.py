"""`roll view`: a page of recorded runs in the browser. Reads files only; imports neither torch nor a tokenizer."""
