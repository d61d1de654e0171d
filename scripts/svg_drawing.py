"""Shapes and texts of the README's pictures, and what the scripts that draw them have in common."""
import pathlib
import subprocess
import sys


def output_of(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"status {result.returncode} from: {' '.join(command)}\n{result.stderr}")
    return result.stdout


class Drawing:
    def __init__(self, width, height, title, description):
        self.lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                      f'height="{height}" font-family="sans-serif" font-size="13" fill="#222" role="img">',
                      f"<title>{title}</title>", f"<desc>{description}</desc>",
                      f'<rect width="{width}" height="{height}" fill="#fff"/>']

    def box(self, x, y, width, height, colour):
        self.lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def text(self, x, y, words, anchor="start", more=""):
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>')

    def curve(self, points, colour):
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="1.5"/>')

    def line(self, x, y, to_x, to_y):
        self.lines.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#999"/>')

    def __str__(self):
        return "\n".join([*self.lines, "</svg>"]) + "\n"


BOLD = ' font-weight="bold"'


def main(usage, picture, script):
    """Prints the picture; with --compare FILE nothing where the file is that picture, and else exit status 1."""
    if len(sys.argv) == 1:
        print(picture(), end="")
    elif len(sys.argv) == 3 and sys.argv[1] == "--compare":
        if pathlib.Path(sys.argv[2]).read_text(encoding="utf-8") != picture():
            sys.exit(f"{sys.argv[2]} is not what scripts/{script} prints now: scripts/{script} > {sys.argv[2]}")
    else:
        sys.exit(usage)
