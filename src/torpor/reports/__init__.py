"""Terminal tables and the HTML report, made from plain result objects."""
