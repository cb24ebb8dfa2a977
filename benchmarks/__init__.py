"""What this project measures to publish it; `weft bench` has what people measure on their own machines."""
