"""What a run tells: metrics per step."""
