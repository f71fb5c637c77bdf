"""Recording what a first run did, and replaying it: what is kept, and what is not computed again."""
