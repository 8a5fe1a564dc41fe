"""How `jc.checkpoint` stores what a policy chose, and differentiates from that."""
