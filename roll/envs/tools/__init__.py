"""Tools that a policy can call: what they are told as, how calls are read off a response, how they run."""
