#!/usr/bin/env bash
# pack.sh FOLDER FILE MIB: the folder as FILE (tar, xz), with the sums of all its files in FOLDER/SHA256SUMS and of the
# archive in FILE.sha256; nothing of more than MIB. A step of bundle.sh. Equal contents give an equal archive.
# Exit status: 0 made, 2 usage, 3 over the budget, with the largest files named.
set -euo pipefail
[ $# = 3 ] || { echo "pack.sh: FOLDER FILE MIB are needed" >&2; exit 2; }
folder=$1 out=$2 budget=$3
[ -d "$folder" ] || { echo "pack.sh: $folder is no folder" >&2; exit 2; }

rm -f "$folder/SHA256SUMS"
sums=$(cd "$folder" && find . -type f -print0 | sort -z | xargs -0 sha256sum)
printf '%s\n' "$sums" > "$folder/SHA256SUMS"

# The programs contain the same kernels. A dictionary that spans several programs compresses them once.
dictionary=$(($(du -sm "$folder" | cut -f1) + 1))
[ "$dictionary" -lt 192 ] || dictionary=192
trap 'rm -f "$out.part"' EXIT
# The first setting takes a fifth of the second one's time, and some more bytes.
for setting in preset=3,nice=273 preset=6; do
  tar -C "$(dirname "$folder")" --sort=name --owner=0 --group=0 --numeric-owner --mode=go-w --mtime='2000-01-01 00:00Z' \
    -cf - "$(basename "$folder")" | xz -T1 --lzma2="$setting,dict=${dictionary}MiB" > "$out.part"
  bytes=$(stat -c %s "$out.part")
  [ "$bytes" -gt $((budget * 1048576)) ] || break
done
mib() { awk -v b="$1" 'BEGIN {printf "%.1f", b / 1048576}'; }
if [ "$bytes" -gt $((budget * 1048576)) ]; then
  {
    echo "the archive would have $(mib "$bytes") MiB, and the budget is $budget. The largest files in it:"
    find "$folder" -type f -printf '%s %P\n' | sort -rn | awk 'NR <= 15 {printf "  %7.1f MiB  %s\n", $1 / 1048576, $2}'
  } >&2
  exit 3
fi
mv "$out.part" "$out"
(cd "$(dirname "$out")" && sha256sum "$(basename "$out")") > "$out.sha256"
echo "$out: $(mib "$bytes") MiB of at most $budget, $(mib "$(du -sb "$folder" | cut -f1)") MiB unpacked"
