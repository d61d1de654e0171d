#!/usr/bin/env python3
"""Checks that users find answers: each question of docs/answers.json is answered on its page, which few links lead to.

    scripts/answers.py [REPOSITORY]    names each answer that is gone or further away; exit status 1 then

An entry has a `question`, the `page` with the answer, a `phrase` of the answer (blanks and line ends are alike), and `links`: the most
links that a reader may have to follow from README.md to the page. The number is what it was when the question was written down.
"""
import json
import pathlib
import posixpath
import re
import sys

LEAST = 25  # questions


def links_of(root, page):
    """The pages that a page links."""
    text = re.sub(r"^```.*?^```", "", (root / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\)", text):
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if re.match(r"[a-z]+:", target) is None and linked.endswith(".md") and (root / linked).is_file():
            yield linked


def distances(root):
    """{page: the least number of links from README.md}"""
    found, current = {"README.md": 0}, ["README.md"]
    while current:
        page = current.pop(0)
        for linked in links_of(root, page):
            if linked not in found:
                found[linked] = found[page] + 1
                current.append(linked)
    return found


def problems(root):
    answers = json.loads((root / "docs" / "answers.json").read_text(encoding="utf-8"))
    distance, wrong = distances(root), []
    if len(answers) < LEAST:
        wrong.append(f"there are {len(answers)} questions, and at least {LEAST} are wanted")
    for answer in answers:
        question, page = answer["question"], answer["page"]
        if not (root / page).is_file():
            wrong.append(f"{question} There is no {page}")
            continue
        if " ".join(answer["phrase"].split()) not in " ".join((root / page).read_text(encoding="utf-8").split()):
            wrong.append(f"{question} {page} does not say: {answer['phrase']}")
        if page not in distance:
            wrong.append(f"{question} No links lead from README.md to {page}")
        elif distance[page] > answer["links"]:
            wrong.append(f"{question} {page} is {distance[page]} links away from README.md, and at most {answer['links']} are wanted")
    return wrong


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    wrong = problems(root)
    if wrong:
        sys.exit("\n".join(wrong))
    print("every question has its answer, and no answer is further away than before")


if __name__ == "__main__":
    main()
