"""The paper, and only the paper. `equations` has one pure function for each numbered line of the method."""
