"""Notebooks made from MyST Markdown: the builder, the rules that they keep, the form in which they are stored."""
