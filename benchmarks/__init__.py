"""What is measured of Weft, beside what people run today: `python -m benchmarks` lists it."""
