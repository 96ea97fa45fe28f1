"""Names of what a session can be told, for the command line too: importing them costs nothing."""

ON_LIMIT = ("stop", "roll", "sinks")
ADDRESSES = ("moving", "fixed")
MEMORIES = ("fast", "low")  # packed copies of the weights, or none
DEFAULT_SINKS = 4  # StreamingLLM, arXiv 2309.17453, section 3.2
DEFAULT_NEW_TOKENS = 256
