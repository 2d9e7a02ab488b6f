"""Objectives as four independent choices: ratio, correction, aggregation, and KL or entropy terms."""
