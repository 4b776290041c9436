"""Worlds whose every nanosecond is known: a simulator of LLM serving that speaks the emitters' formats."""
