"""The main job: train a small GPT on real text with several schedules, and compare. Needs torch."""
