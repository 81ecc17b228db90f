"""What a step may hold: where prompt chunks end, and the record of what each step did."""
