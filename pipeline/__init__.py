"""The command line: settings, plan, resume, publishing and reports."""
