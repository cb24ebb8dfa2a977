"""What a sweep decides: in which order trials start, who stops or waits, and which steps the budget still pays for."""
