#!/usr/bin/env bash
# Unpacks the offline bundle in a system that has bash, the small tools beside it, libc, Python and CUDA's libraries, and nothing
# else: no source tree, no build folder, no library that Tranche uses, no network but loopback, nothing in /dev/shm. There it runs
# check.sh, tranche info, one case of each test program for GPUs (which say why they skip) and the whole of run.sh. Prints the
# archive's size and what each file takes.
#   scripts/gpu/bundle_check.sh [ARCHIVE]
#     ARCHIVE  default: bundle.sh makes build/gpu-bundle.tar.xz for compute capability 9.0
# Needs root, and for making the archive what bundle.sh needs. Exit status: 0 all of it works, 1 something does not, 2 usage,
# 77 this machine cannot do it (no root, no nvcc).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)
top=$(cd "$here/../.." && pwd -P)
skip() { echo "bundle_check.sh: skipped: $1"; exit 77; }
case ${1:-} in
  -h | --help) sed -n '2,10s/^# \?//p' "$0"; exit 0 ;;
  -*) echo "bundle_check.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
esac
archive=${1:-}
[ -z "$archive" ] || [ -f "$archive" ] || { echo "bundle_check.sh: '$archive' does not exist" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || skip "only root can enter another system"
# Mounts and network are in namespaces of this process, so that they disappear with it in any case. As on some GPU hosts, the network has
# only loopback.
if [ "${TRANCHE_BUNDLE_MOUNTS:-}" != own ]; then
  if [ -z "$archive" ]; then
    command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || skip "there is no nvcc"
    "$here/bundle.sh" --gpu 90
    archive=$top/build/gpu-bundle.tar.xz
  fi
  TRANCHE_BUNDLE_MOUNTS=own exec unshare --mount --pid --net --fork --propagation private "$0" "$(readlink -f "$archive")"
fi

ip link set lo up || skip "ip cannot raise the loopback interface"
root=$(mktemp -d)
trap 'umount -R "$root" 2> /dev/null || true; rm -rf "$root"' EXIT
mount -t tmpfs -o size=3g none "$root"
mkdir -p "$root"/{usr/bin,usr/lib,usr/lib64,proc,dev,tmp,root,etc,bundle,usr/local/cuda/lib64}
ln -s usr/bin "$root/bin" && ln -s usr/bin "$root/sbin" && ln -s usr/lib "$root/lib" && ln -s usr/lib64 "$root/lib64"
put() {  # copies a file of this system to the same place, with the libraries that it needs
  local file=$1 library
  [ -e "$root$file" ] || install -D "$(readlink -f "$file")" "$root$file"
  { ldd "$file" 2> /dev/null || true; } | { grep -o '/[^ ]*' || true; } | while IFS= read -r library; do
    [ -e "$root$library" ] || install -D "$(readlink -f "$library")" "$root$library"
  done
}
for tool in bash sh env cat cp mv rm ls ln mkdir rmdir mktemp touch chmod stat du head tail cut sort uniq wc tr tee date sleep dirname \
  basename readlink timeout sha256sum id uname nproc seq paste printf sed grep awk find xargs getconf ldd tar xz flock hostname; do
  file=$(PATH=/usr/sbin:/usr/bin:/sbin:/bin type -P "$tool") || skip "this system has no $tool"
  put "$file"
  [ -e "$root/usr/bin/$tool" ] || ln -s "${file##*/}" "$root/usr/bin/$tool"
done
# The C library's parts, which programs still name separately, such as libpthread.so.0.
for name in libpthread.so.0 libdl.so.2 librt.so.1 libm.so.6 libutil.so.1 libresolv.so.2 libnss_files.so.2; do
  file=$(ldconfig -p 2> /dev/null | sed -n "s#.*$name (libc6,x86-64.* => ##p" | head -n 1)
  [ -z "$file" ] || put "$file"
done
python=$(readlink -f /usr/bin/python3) || skip "this system has no /usr/bin/python3"
put "$python"
ln -sf "${python##*/}" "$root/usr/bin/python3"
modules=/usr/lib/${python##*/}
mkdir -p "$root/usr/lib"
cp -a "$modules" "$root/usr/lib/"
for file in "$modules"/lib-dynload/*.so; do put "$file"; done
cuda=${CUDA_HOME:-/usr/local/cuda}
for file in "$cuda"/lib64/lib{cublas,cublasLt,nccl}.so.*; do
  if [ -e "$file" ]; then
    touch "$root/usr/local/cuda/lib64/${file##*/}"
    mount --bind "$(readlink -f "$file")" "$root/usr/local/cuda/lib64/${file##*/}"
  fi
done
printf 'root:x:0:0::/root:/bin/bash\n' > "$root/etc/passwd"
printf '127.0.0.1 localhost\n' > "$root/etc/hosts"
mount -t proc none "$root/proc"
mount --rbind /dev "$root/dev"
# Containers have little or no /dev/shm.
[ ! -d "$root/dev/shm" ] || mount -t tmpfs -o ro,size=4k none "$root/dev/shm"
tar -C "$root/bundle" -xJf "$archive"
failed=0
chroot=$(PATH=/usr/sbin:/sbin:$PATH type -P chroot) || skip "this system has no chroot"
inside() { env -i PATH=/usr/bin HOME=/root TMPDIR=/tmp LC_ALL=C PYTHONUTF8=1 "$chroot" "$root" /bin/bash -c "cd /bundle/tranche-gpu-bundle && $1"; }
verdict() { if [ "$1" -eq 0 ]; then echo "ok      $2"; else echo "FAILED  $2"; failed=1; fi; }

echo "== what the archive holds"
bytes=$(stat -c %s "$archive")
tar -tvJf "$archive" | awk '$1 ~ /^-/ {printf "%9.2f MiB  %s\n", $3 / 1048576, $6}' | sort -rn
tracked=$(git -C "$top" ls-files -z --cached --others --exclude-standard | (cd "$top" && xargs -0 -r stat -c %s --) | awk '{sum += $1} END {print sum + 0}')
awk -v a="$bytes" -v t="$tracked" 'BEGIN {printf "archive %.2f MiB, tracked files %.2f MiB, together %.2f MiB of at most 62\n", a / 1048576, t / 1048576, (a + t) / 1048576}'
verdict $((bytes + tracked > 62 * 1048576)) "the archive and the tracked files travel together"

echo "== check.sh"
status=0
inside "./check.sh --allow-no-gpu --full" || status=$?
verdict $status "check.sh finds no gap"

echo "== tranche info"
status=0
said=$(inside ". ./env.sh; tranche info" 2>&1) || status=$?
echo "$said"
verdict $status "tranche info"
found=1
case $said in *unavailable*) ;; *OpenBLAS*oneDNN*) found=0 ;; esac
verdict $found "tranche info finds oneDNN and OpenBLAS"

echo "== one case of each test program"
programs=$(python3 -c 'import json, sys
for entry in json.load(open(sys.argv[1])):
    if entry.get("googletest"): print(entry["command"][0].replace("@BUILD@/", ""))' "$root/bundle/tranche-gpu-bundle/gpu_tests.json" | sort -u)
[ -n "$programs" ] || verdict 1 "the archive lists test programs"
for program in $programs; do
  status=0
  said=$(inside ". ./env.sh; GTEST_TOTAL_SHARDS=1000000 GTEST_SHARD_INDEX=0 $program" 2>&1) || status=$?
  reason=$(grep -A1 ': Skipped' <<< "$said" | tail -n 1 || true)
  [ "$status" -eq 0 ] || echo "$said" | tail -n 5
  verdict "$status" "$program: ${reason:-$(grep -o '\[  PASSED  \].*' <<< "$said" | head -n 1)}"
done

echo "== run.sh"
status=0
said=$(inside "scripts/gpu/run.sh --allow-no-gpu --limit 120 --results /tmp/results" 2>&1) || status=$?
[ "$status" -eq 0 ] || echo "$said" | tail -n 40
verdict $status "run.sh --allow-no-gpu"
exit $failed
