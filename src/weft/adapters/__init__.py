"""PEFT methods, slots and the routing table."""
