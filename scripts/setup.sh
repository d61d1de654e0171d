#!/usr/bin/env bash
# Installs the Debian packages that Tranche is built from; does nothing when all are there.
#   scripts/setup.sh [--checks | --cluster]
#     --checks     those of the checks of sources too, clang-tidy and Doxygen, which no build needs
#     --cluster    those of scripts/cluster_test.sh too: Slurm, sshd and ip, for two hosts on this machine
# Exit status: 0 all there, 2 packages are missing and only root can install them, else apt's.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config git python3
  ccache mold                         # compile and link faster; used when found
  libopenmpi-dev openmpi-bin          # ranks
  libdnnl-dev                         # bf16 matmul
  # fp32 matmul. This is the pthread variant, because our threads call it with one thread each. Limiting the OpenMP variant to one thread
  # also changes the number of OpenMP threads of the caller. Both are equally fast when independent threads call them. From an OpenMP team
  # the OpenMP variant may be faster, which has to be measured on an idle machine.
  libopenblas-pthread-dev
  libhwy-dev                          # SIMD with run-time dispatch
  nlohmann-json3-dev libcli11-dev libspdlog-dev libfmt-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  libhdf5-dev libxxhash-dev           # checkpoints, and their digests
  python3-h5py                        # tests open checkpoints as users do
  liburing-dev                        # transfers without the page cache; without it threads do them
  libpcre2-dev libutf8proc-dev        # tokenizers: patterns and normalization of Unicode
  libsentencepiece-dev                # tokenizers of Llama 2 and Mistral
  xz-utils                            # packs the bundle for GPU hosts
  dictzip                             # opens the quickstart's text
)
case ${1:-} in
  "") ;;
  --checks) packages+=(clang-tidy-16 libomp-16-dev doxygen) ;;  # scripts/tidy.sh (Clang has no omp.h of its own), scripts/api_pages.sh
  --cluster) packages+=(slurm-wlm munge openssh-server openssh-client iproute2) ;;
  *) echo "usage: scripts/setup.sh [--checks | --cluster]" >&2; exit 2 ;;
esac

missing=()
if ! command -v dpkg-query > /dev/null; then
  echo "setup: this is not a Debian system; install what these Debian packages hold: ${packages[*]}" >&2
  exit 2
fi
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}\n' "$package" 2> /dev/null || true)
  grep -qx installed <<< "$status" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "setup: all ${#packages[@]} packages are there"
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  {
    echo "setup: ${#missing[@]} packages are missing, and only root can install them:"
    echo "  sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}"
  } >&2
  exit 2
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# The test starts its own daemons; those of the packages must not run at the same time.
if [ "${1:-}" = --cluster ] && [ ! -e /usr/sbin/policy-rc.d ]; then
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
fi
apt-get install -y -q --no-install-recommends "${missing[@]}"
