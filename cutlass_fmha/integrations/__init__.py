"""Places where other libraries let an attention implementation plug in. Importing registers nothing."""
