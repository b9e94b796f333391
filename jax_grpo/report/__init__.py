"""What a user sees of a run: metrics files, the console, samples, health, curves, boards and the page of a report.

Owns texts and pictures made of numbers that others computed. Knows neither the trainer nor how anything is judged.
"""
