"""Claims: which operator serves an object where several run."""
