"""Tables, figures and pages that present the results of runs."""
