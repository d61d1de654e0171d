#!/usr/bin/env bash
# Runs the README's commands on a bare Debian 12: creates one in a folder (debootstrap, the smallest variant), clones a commit into it,
# runs the commands of the README's section "Two commands" word for word without inherited variables, and prints their durations.
# Needs root, debootstrap, and apt sources of Debian 12, whose mirror and proxy are used. Cleans up in any case.
#   scripts/bare_check.sh [--keep] [--folder DIR] [--commands] [--put FILE] [--run COMMAND] [COMMIT]
#     COMMIT        commit to clone (HEAD)
#     --folder DIR  folder of the system, which takes some 4 GB; it must be empty or not exist (default: a new one in TMPDIR or /tmp)
#     --keep        does not remove the system
#     --commands    only prints the commands in COMMIT's README
#     --put FILE    copies a file of this machine into the folder ~ of that system
#     --run COMMAND runs this in the clone, in place of the README's commands (scripts/package_check.sh)
# Exit status: 0 all commands ended with 0, 1 a command failed or the system could not be created, 2 usage or something is missing.
set -euo pipefail
release=bookworm
repository=$(cd "$(dirname "$0")/.." && pwd)

usage() { echo "bare_check: $*; see --help" >&2; exit 2; }

keep=no folder="" only_commands=no commit="" put="" run=""
while [ $# -gt 0 ]; do
  case $1 in
    --keep) keep=yes ;;
    --commands) only_commands=yes ;;
    --folder)
      [ $# -gt 1 ] || usage "--folder needs a folder"
      folder=$2
      shift
      ;;
    --put | --run)
      [ $# -gt 1 ] || usage "$1 needs a $([ "$1" = --put ] && echo file || echo command)"
      if [ "$1" = --put ]; then put=$2; else run=$2; fi
      shift
      ;;
    -h | --help) sed -n '2,12s/^# \?//p' "$0"; exit 0 ;;
    -*) usage "unknown argument '$1'" ;;
    *) [ -z "$commit" ] || usage "one commit, not '$commit' and '$1'"; commit=$1 ;;
  esac
  shift
done
asked=${commit:-HEAD}
commit=$(git -C "$repository" rev-parse --verify --quiet "$asked^{commit}") || usage "no commit '$asked'"
[ -z "$put" ] || [ -f "$put" ] || usage "no file '$put'"

if [ -n "$run" ]; then
  commands=("$run")
else
  mapfile -t commands < <(git -C "$repository" show "$commit:README.md" |
    awk '/^## /{here = $0 == "## Two commands"} here && /^```/{if (inside) exit; inside = 1; next} inside')
  [ ${#commands[@]} -eq 2 ] || { echo "bare_check: README.md has ${#commands[@]} commands under 'Two commands', not two" >&2; exit 1; }
fi
if [ $only_commands = yes ]; then
  printf '%s\n' "${commands[@]}"
  exit 0
fi

[ "$(id -u)" -eq 0 ] || { echo "bare_check: only root can make a system and enter it" >&2; exit 2; }
command -v debootstrap > /dev/null || { echo "bare_check: debootstrap is missing: apt-get install debootstrap" >&2; exit 2; }
sources=$(apt-get indextargets --format 'deb $(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  grep -E "^deb [^ ]+ $release(-updates|-security)? main\$" | sort -u) || true
mirror=$(sed -n "s/^deb \([^ ]*\) $release main\$/\1/p" <<< "$sources" | head -n 1)
[ -n "$mirror" ] || { echo "bare_check: this machine's apt has no source of $release main, whose mirror would be used" >&2; exit 2; }

# Mounts are in a mount namespace of this process, so that they disappear with it in any case.
if [ "${TRANCHE_BARE_MOUNTS:-}" != own ]; then
  arguments=("$commit")
  [ $keep = no ] || arguments+=(--keep)
  [ -z "$folder" ] || arguments+=(--folder "$folder")
  [ -z "$put" ] || arguments+=(--put "$put")
  [ -z "$run" ] || arguments+=(--run "$run")
  TRANCHE_BARE_MOUNTS=own exec unshare --mount --propagation private "$0" "${arguments[@]}"
fi

if [ -n "$folder" ]; then
  mkdir -p "$folder"
  [ -z "$(ls -A "$folder")" ] || usage "$folder is not empty"
  folder=$(cd "$folder" && pwd)
else
  folder=$(mktemp -d "${TMPDIR:-/tmp}/tranche-bare.XXXXXX")
fi
chmod 755 "$folder"  # apt's own user goes through it
table=()
running=""

finish() {
  local status=$?
  trap - EXIT INT TERM HUP
  if [ -n "$running" ]; then  # with all that it started; unshare --fork ignores SIGTERM
    kill -KILL "$running" 2> /dev/null || true
    wait "$running" 2> /dev/null || true
  fi
  cd /
  for place in dev/shm dev/pts sys; do
    if mountpoint -q "$folder/$place"; then umount --lazy "$folder/$place"; fi
  done
  if [ $keep = yes ]; then echo "bare_check: the system is left in $folder"; else rm -rf --one-file-system "$folder"; fi
  printf '%-24s %9s  %s\n' "command of ${commit:0:7}" seconds result
  [ ${#table[@]} -eq 0 ] || printf '%s\n' "${table[@]}"
  exit $status
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

seconds_since() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN {printf "%.1f", b - a}'; }

begin=$(date +%s.%N)
echo "bare_check: Debian 12 into $folder"
if ! debootstrap --variant=minbase "$release" "$folder" "$mirror" > "$folder.log" 2>&1; then
  tail -n 20 "$folder.log" >&2
  exit 1
fi
rm -f "$folder.log"
# apt uses the mirror and proxy of this machine; nothing else of the machine is used.
echo "$sources" > "$folder/etc/apt/sources.list"
apt-config dump | grep -E '^Acquire::' > "$folder/etc/apt/apt.conf.d/99bare-check" || true
for scheme in http https; do
  proxy=${scheme}_proxy
  [ -z "${!proxy:-}" ] || echo "Acquire::$scheme::Proxy \"${!proxy}\";" >> "$folder/etc/apt/apt.conf.d/99bare-check"
done
if grep -q '^deb https:' <<< "$sources"; then  # the smallest Debian has no certificates
  cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/apt/bare-check.crt"
  echo 'Acquire::https::CaInfo "/etc/apt/bare-check.crt";' >> "$folder/etc/apt/apt.conf.d/99bare-check"
fi
cp /etc/resolv.conf /etc/hosts "$folder/etc/"
mount -t sysfs -o ro sysfs "$folder/sys"
mkdir -p "$folder/dev/pts" "$folder/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$folder/dev/pts"
mount -t tmpfs tmpfs "$folder/dev/shm"
git clone --quiet --no-hardlinks --no-checkout "$repository" "$folder/root/tranche"
git -C "$folder/root/tranche" checkout --quiet --detach "$commit"
[ -z "$put" ] || cp "$put" "$folder/root/"
echo "bare_check: that took $(seconds_since "$begin") s"

for command in "${commands[@]}"; do
  name=${command%%[[:space:]]*}
  echo "== $command"
  begin=$(date +%s.%N)
  status=0
  # The command runs in a PID namespace, so that none of its processes outlives it.
  unshare --pid --fork --kill-child --mount-proc="$folder/proc" chroot "$folder" /usr/bin/env -i \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb /bin/bash -c "cd ~/tranche && $command" &
  running=$!
  wait "$running" || status=$?
  running=""
  table+=("$(printf '%-24s %9s  %s' "$name" "$(seconds_since "$begin")" "$([ $status -eq 0 ] && echo passed || echo "FAILED, status $status")")")
  [ $status -eq 0 ] || exit 1
done
