"""The process of one model: its engine thread, inbox, start-up guard and changes of config."""
