"""Images and videos: decoded and processed beside the daemon, encoded by the model's own vision tower."""
