"""Runs commands for suite.py, each in a session of its own with its output in a file, and ends all of their processes. A suite that is killed
cannot do so; the next one ends those that carry its mark."""
import os
import pathlib
import signal
import subprocess
import time

KILL_SECONDS = 5.0  # a process that waits inside the driver (state D) survives SIGKILL
MARK = "TRANCHE_GPU_RUN"  # The variable in the environment of every command, with the folder of its results.


def files(name):
    """Yields (process id, bytes of /proc/ID/name) of all processes. It skips those that end meanwhile; pathlib's glob() would throw for them."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield int(process), pathlib.Path("/proc", process, name).read_bytes()
        except OSError:  # It has ended since, or belongs to another user.
            continue


def members(session):
    """Process ids of a session, without those that have ended and only wait for their parent."""
    found = []
    for pid, text in files("stat"):
        state, _, _, its_session = text[text.rfind(b")") + 2:].split()[:4]  # the preceding name may contain any characters
        if int(its_session) == session and state not in (b"Z", b"X"):
            found.append(pid)
    return found


def end_session(session, seconds=KILL_SECONDS):
    """Kills all processes of a session and returns the ids of those that did not end. A signal to the process group would not reach ranks
    of Open MPI, each of which has its own group."""
    end = time.time() + seconds
    while True:
        left = members(session)
        if not left or time.time() > end:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # It has ended since.
                pass
        time.sleep(0.02)


def end_marked(folder):
    """Kills the processes whose mark is `folder`, and waits until they have ended. Returns their number."""
    wanted, killed, end = f"{MARK}={folder}".encode(), set(), time.time() + KILL_SECONDS
    while True:
        left = 0
        for pid, environment in files("environ"):
            if pid == os.getpid() or wanted not in environment.split(b"\0"):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # It has ended since, or belongs to another user.
                continue
            left += 1
            killed.add(pid)
        if not left or time.time() > end:
            return len(killed)
        time.sleep(0.05)


class Command:
    """A running command. Its output is a file instead of a pipe, because a pipe stays open while any leftover process lives."""

    def __init__(self, words, folder, environment, output, stdin=subprocess.DEVNULL):
        output.unlink(missing_ok=True)
        with output.open("ab") as file:  # ranks append, otherwise they would overwrite each other's output
            self.process = subprocess.Popen([str(word) for word in words], stdin=stdin, stdout=file,
                                            stderr=subprocess.STDOUT, cwd=str(folder), start_new_session=True,
                                            env=environment)
        self.file, self.words = output.open("rb"), words

    def wait(self, seconds):
        """Returns the exit status, or None while the command runs."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def news(self):
        """Returns the bytes of output since the last call."""
        return self.file.read()

    def end(self):
        """Ends the remaining processes; returns the ids of those that cannot be ended."""
        left = end_session(self.process.pid)
        self.wait(0.0 if left else KILL_SECONDS)
        return left

    def close(self):
        self.file.close()
