"""Errors of the operating system as errors that a user can correct."""

import errno
import os

from jaxmem.errors import UserError

# Errors of system calls for files and directories that cannot be used, and for limits of the machine.
_OF_THE_MACHINE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ESTALE),
)
_MORE_FILES = "too many open files: raise the limit with `ulimit -n 4096`"


def as_user_error(error: BaseException) -> BaseException:
    """A UserError if the cause is the machine (a directory that cannot be written, a full disk, too few file
    descriptors), otherwise the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE:
            if cause.errno in (errno.EMFILE, errno.ENFILE):
                return UserError(_MORE_FILES)
            return UserError(f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause.strerror))
        if not isinstance(cause, UserError) and os.strerror(errno.EMFILE) in str(cause):  # from a library in C++
            return UserError(_MORE_FILES)
        cause = cause.__cause__
    return error
