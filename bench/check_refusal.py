#!/usr/bin/env python3
"""check_refusal.py PROGRAM TYPED MEANT: given the flag TYPED, PROGRAM must measure nothing, suggest MEANT, and
end with status 2.
"""
import subprocess
import sys

program, typed, meant = sys.argv[1:]
for arguments in ([typed, "1"], [f"{typed}=1"]):
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=50)
    text = f"unknown flag {typed} (did you mean {meant}?); --help lists the flags"
    if result.returncode != 2 or text not in result.stderr or result.stdout:
        sys.exit(f"{' '.join([program, *arguments])} ended with {result.returncode}, not 2 and '{text}':\n"
                 f"{result.stdout}{result.stderr}")
