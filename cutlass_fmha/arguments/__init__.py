"""Every rule about the arguments of a call, and the sentence that says which one was broken."""
