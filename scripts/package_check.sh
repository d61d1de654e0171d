#!/usr/bin/env bash
# The Debian package on a bare Debian 12: builds it (cpack), installs it with apt in a system that scripts/bare_check.sh makes, trains with
# it what the quickstart trains, removes it, and compares the files of that system with those before: nothing may be left.
# Needs root, debootstrap and a mirror as bare_check.sh does, and the committed scripts.
#   scripts/package_check.sh [PACKAGE.deb]     a package that is there is not built
# Exit status: 0 as expected, 1 not, 2 usage or something is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /root/tranche -o -path /root/run \) -prune -o -print | sort; }

inside() {
  local package
  package=$(ls /root/tranche_*.deb)
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  echo "== What it depends on"
  # What apt would install beside it comes first, so that the comparison is of the package alone.
  mapfile -t others < <(apt-get install -s "$package" | sed -n 's/^Inst \([^ ]*\) .*/\1/p' | grep -vx tranche)
  apt-get install -y -q "${others[@]}" > /root/apt.log 2>&1 || { tail -n 20 /root/apt.log; exit 1; }
  echo "${#others[@]} packages of Debian"
  touch /root/after  # it is there in both lists
  files > /root/before
  echo "== Install"
  apt-get install -y -q --no-install-recommends "$package" 2>&1 | tee /root/apt.log | tail -n 3
  grep -q '^0 upgraded, 1 newly installed' /root/apt.log || { echo "package_check: apt installed more than the package"; exit 1; }
  dpkg-query -W -f '${Package} ${Version}: ${Installed-Size} kB installed; depends on ${Depends}\n' tranche
  grep -q "No licence is chosen for this program yet" /usr/share/doc/tranche/copyright
  echo "== Train"
  mkdir -p /root/run
  (cd /root/run && /usr/share/tranche/quickstart.sh)
  rm -rf /root/run
  echo "== Remove"
  apt-get purge -y -q tranche 2>&1 | tail -n 2
  files > /root/after
  diff /root/before /root/after || { echo "package_check: removing the package left other files than there were before"; exit 1; }
  echo "package_check: $(wc -l < /root/before) files and folders before, and the same after"
}

if [ "${1:-}" = --inside ]; then
  inside
  exit 0
fi
[ $# -le 1 ] || { echo "usage: scripts/package_check.sh [PACKAGE.deb]" >&2; exit 2; }
package=${1:-}
if [ -z "$package" ]; then
  . scripts/build_settings.sh
  started=$(date +%s)
  cmake -S . -B build/package -G Ninja -DCMAKE_BUILD_TYPE=Release -DTRANCHE_SHARED=ON -DTRANCHE_CUDA=OFF -DTRANCHE_TESTS=OFF -DTRANCHE_BENCHES=OFF \
    -DTRANCHE_EXAMPLES=OFF -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=16 > build/package.log
  cmake --build build/package --parallel "$jobs" >> build/package.log
  rm -f build/package/*.deb
  (cd build/package && cpack) >> build/package.log || { tail -n 20 build/package.log >&2; exit 1; }
  package=$(ls build/package/tranche_*.deb)
  echo "$package: $(stat -c %s "$package") bytes, built in $(($(date +%s) - started)) s"
fi
exec scripts/bare_check.sh --put "$package" --run "scripts/package_check.sh --inside"
