"""Mistakes that a user can mend. The command line prints the message alone and exits with 2."""


class CsdaError(Exception):
    """Base of all expected failures: the message names the thing and the way out."""


class ConfigError(CsdaError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(CsdaError):
    """Images, labels or splits cannot be used as they are; names the file and, where there is one, the row."""


class RunError(CsdaError):
    """A run folder is missing, torn, foreign, or was made with another configuration."""
