#!/usr/bin/env bash
# Packs what a GPU host without a network needs into one archive: the program, tests for GPUs and benches for GPUs of the
# release build, stripped; the Debian libraries they ask for and Open MPI's run time; env.sh, check.sh and run.sh; a MANIFEST
# of versions and the sums of all files.
#   scripts/gpu/bundle.sh [--out FILE] [--build DIR] [--no-build] [--debs DIR] [--budget MIB] [--gpu CAPABILITY] [--headers]
#     --out FILE     the archive (default build/gpu-bundle.tar.xz); FILE.sha256 is written beside it
#     --build DIR    a build folder (default build/cuda)
#     --no-build     takes the programs as they are there
#     --debs DIR     where downloaded packages are kept and found again (default build/gpu-debs)
#     --budget MIB   refuses to make a larger archive (default: 62 MiB less the bytes of the files that git tracks or does
#                    not ignore, since all of them travel together where at most 64 MiB do)
#     --gpu CAPABILITY  kernels for these GPUs (90: H100, H200) and newer ones that translate them, instead of for 80 and 90
#     --headers      packs headers and tools too, for run.sh --build
# Needs Debian 12 with the packages of scripts/setup.sh and, for packages not yet in DIR, a network.
# Exit status: 0 made, 1 the build failed, 2 usage or something missing, 3 over the budget.
# shellcheck disable=SC2031  # env.sh, sourced in a subshell below, has locals of the same names
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)

out=$root/build/gpu-bundle.tar.xz build=$root/build/cuda debs=$root/build/gpu-debs budget="" compile=1 gpu="" headers=0
fail() { echo "bundle.sh: $1" >&2; exit "${2:-2}"; }
while [ $# -gt 0 ]; do
  case $1 in
    --out | --build | --debs | --budget | --gpu)
      [ $# -gt 1 ] || fail "$1 needs a value; see --help"
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --no-build) compile=0 ;;
    --headers) headers=1 ;;
    -h | --help) sed -n '2,16s/^# \?//p' "$0"; exit 0 ;;
    *) fail "unknown argument '$1'; see --help" ;;
  esac
  shift
done
if [ -z "$budget" ]; then
  tracked=$(git -C "$root" ls-files -z --cached --others --exclude-standard 2> /dev/null | (cd "$root" && xargs -0 -r stat -c %s -- 2> /dev/null || true) | awk '{sum += $1} END {print sum + 0}')
  budget=$((62 - (tracked + 1048575) / 1048576))
  [ "$budget" -gt 0 ] || fail "the files that git tracks or does not ignore are $((tracked / 1048576)) MiB: nothing can travel beside them; see --budget"
  echo "budget: $budget MiB, which is 62 less the $(awk -v b="$tracked" 'BEGIN {printf "%.1f", b / 1048576}') MiB of files that git tracks or does not ignore"
fi
[[ $budget =~ ^[1-9][0-9]*$ ]] || fail "--budget '$budget' is not a number of MiB"
[[ $gpu =~ ^([1-9][0-9]+)?$ ]] || fail "--gpu '$gpu' is not a compute capability without its dot, as in 90"
[ -z "$gpu" ] || [ "$compile" = 1 ] || fail "--gpu is for the build, and --no-build says that there is none"
for tool in apt-get dpkg-deb ctest strip objdump ldd xz python3; do
  command -v "$tool" > /dev/null || fail "$tool is missing"
done

if [ "$compile" = 1 ]; then
  if [ ! -f "$build/CMakeCache.txt" ] || [ -n "$gpu" ]; then
    cmake --preset cuda -S "$root" -B "$build" ${gpu:+"-DCMAKE_CUDA_ARCHITECTURES=$gpu"} > /dev/null ||
      fail "cmake could not configure $build" 1
  fi
  targets=$(cmake --build "$build" --target help | sed -n 's/^\(gpu_tests\|gpu_probe\|attention_samples\|kernel_bounds\|comm_mpi_failing\|bench_[a-z_]*gpu\): phony$/\1/p')
  # shellcheck disable=SC2086
  cmake --build "$build" --target tranche_program test_core $targets || fail "the build in $build failed" 1
fi
[ -x "$build/bin/tranche" ] || fail "$build/bin/tranche is missing: build first, or leave out --no-build"
build=$(cd "$build" && pwd -P)
information=$("$build/bin/tranche" info --json)
told() { python3 -c 'import json, sys
value = json.loads(sys.argv[1])
for key in sys.argv[2].split("."): value = value.get(key, "") if isinstance(value, dict) else ""
print(value)' "$information" "$1"; }
[ "$(told cuda.compiled)" = True ] || fail "$build/bin/tranche was built without CUDA (see -DTRANCHE_CUDA)"
[ "$(told cuda.emulated)" != True ] || fail "$build/bin/tranche was built for emulated GPUs"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
top=$stage/tranche-gpu-bundle
mkdir -p "$top"/{bin,tests,deps,host,scripts/gpu} "$debs" "$(dirname "$out")"

echo "== programs of $build"
"$here/test_list.py" "$build" --source "$root" --labels gpu > "$top/gpu_tests.json"
mapfile -t tests < <({ grep -o '@BUILD@/tests/[^" ]*' "$top/gpu_tests.json" | sed 's|.*/||'
  printf '%s\n' test_core comm_mpi_failing gpu_probe attention_samples kernel_bounds; } | sort -u)
# Copies only what run.sh runs: the program, and the benches with gpu in their names.
for program in "$build"/bin/tranche "$build"/bin/bench_*gpu* "${tests[@]/#/$build/tests/}"; do
  if [ -f "$program" ] && [ -x "$program" ]; then
    strip -o "$top${program#"$build"}" "$program"
  fi
done
# Data files of tests are beside the tests, because the GPU host has neither source tree nor build folder.
cp "$root/tests/combinations.json" "$top/tests/"
injection=$(find "$build/tests/device" -maxdepth 1 -name 'libnvtx_injection.so' | head -n 1)
if [ -n "$injection" ]; then strip -o "$top/tests/libnvtx_injection.so" "$injection"; else echo "note: no libnvtx_injection.so in $build: test_engine_nvtx will fail there"; fi
# Scripts have the same places as in the source tree; those for use by hand are at the top as well.
cp "$root"/scripts/run_mpi.sh "$top/scripts/"
cp "$here"/*.sh "$here"/*.py "$top/scripts/gpu/"
rm "$top"/scripts/gpu/{bundle,pack,env,check}.sh
cp "$here"/{env,check}.sh "$top/"
# Copies tests that are scripts, and the files that they name.
grep -ho '@SOURCE@/[^" ]*' "$top/gpu_tests.json" | sort -u | while IFS= read -r file; do
  file=${file#@SOURCE@/}
  [ -f "$root/$file" ] && install -D "$root/$file" "$top/$file"
done || true

echo "== Debian packages"
wanted() { sed -n "s/^$1 //p" "$here/packages.list"; }
elfs=$(find "$top/bin" "$top/tests" -type f ! -name '*.json')
mapfile -t opened < <(wanted opened | xargs -r dpkg-query -L | grep -E '\.so(\.[0-9.]+)?$' |
  grep -vE '/lib(blas|lapack)\.so' | while IFS= read -r file; do
  [ -L "$file" ] || echo "$file"
done)
[ ${#opened[@]} -gt 0 ] || fail "the packages that packages.list calls 'opened' are not installed here: $(wanted opened | paste -sd ' ')"
# shellcheck disable=SC2086
asked=$(ldd $elfs "${opened[@]}" | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' | sort -u)
owners=()
while IFS= read -r library; do
  package=$(dpkg-query -S "$(readlink -f "$library")" 2> /dev/null || dpkg-query -S "$library" 2> /dev/null || true)
  [ -n "$package" ] && owners+=("${package%%:*}")  # CUDA's own libraries belong to no package
done <<< "$asked"
mapfile -t run < <({ wanted run; wanted opened; printf '%s\n' "${owners[@]}"; } | grep -vxF -e libc6 -f <(wanted host) | sort -u)
mapfile -t host < <(wanted host)
more=()
[ "$headers" = 0 ] || mapfile -t more < <({ wanted build; sed -n '/^packages=(/,/^)/{s/#.*//;p}' "$root/scripts/setup.sh" |
  grep -o '[a-z0-9.-]*-dev\b'; } | sort -u)
mapfile -t missing < <(for package in "${run[@]}" "${host[@]}" "${more[@]}"; do
  ls "$debs/$package"_*.deb > /dev/null 2>&1 || echo "$package"
done)
if [ ${#missing[@]} -gt 0 ]; then
  (cd "$debs" && apt-get download -q -o APT::Sandbox::User=root "${missing[@]}") ||
    fail "could not download ${missing[*]}: run 'apt-get update' with a network, or put the packages into $debs"
fi
packages=()
unpack() {  # FOLDER PACKAGES...
  local folder=$1 package deb
  shift
  for package in "$@"; do
    deb=$(printf '%s\n' "$debs/$package"_*.deb | sort -V | tail -n 1)
    dpkg-deb -x "$deb" "$folder"
    packages+=("$(dpkg-deb -f "$deb" Package) $(dpkg-deb -f "$deb" Version) $(sha256sum "$deb" | cut -d' ' -f1)")
  done
}
unpack "$top/deps" "${run[@]}" "${more[@]}"
unpack "$stage/host" "${host[@]}"

echo "== pruning and links"
usr=$top/deps/usr libraries=$top/deps/usr/lib/x86_64-linux-gnu
if [ -d "$top/deps/lib" ]; then  # packages from before /usr was merged
  cp -a "$top/deps/lib/." "$usr/lib/"
  rm -rf "$top/deps/lib"
fi
find "$usr/share" -mindepth 1 -maxdepth 1 ! -name openmpi ! -name 'pmix*' ! -name cmake ! -name pkgconfig -exec rm -rf {} +
rm -rf "$usr/src" "$libraries/fortran" "$usr/lib/python3" "$libraries"/openmpi/lib/*java*
find "$top/deps" \( -name '*.mod' -o -name '*mpifh*' -o -name '*usempi*' -o -name '*mpi_java*' -o -name '*oshmem*' -o -name 'oshcc' \
  -o -name 'oshrun' -o -name 'shmem*' -o -name 'mpif77*' -o -name 'mpif90*' -o -name 'mpifort*' -o -name 'mpijava*' \
  -o -name '*.jar' \) -exec rm -rf {} +
find "$libraries" -name '*.a' -size +2M -delete
rm -f "$libraries"/openblas-pthread/lib{blas,lapack}.so*  # other names of OpenBLAS
if [ "$headers" = 0 ]; then
  rm -rf "$usr/include" "$usr/share/cmake" "$usr/share/pkgconfig" "$libraries/cmake" "$libraries/pkgconfig"
  find "$libraries" -name '*.a' -delete
fi
# The packages' own scripts, which choose among alternatives, did not run.
link() { [ -e "$2" ] || [ -L "$2" ] || ln -s "$1" "$2"; }
for name in mpirun mpiexec mpicc mpicxx mpic++ mpiCC; do
  if [ -e "$usr/bin/$name.openmpi" ]; then link "$name.openmpi" "$usr/bin/$name"; fi
done
link openblas-pthread/libopenblas.so.0 "$libraries/libopenblas.so.0"
if [ "$headers" = 1 ]; then
  link pkgconf "$usr/bin/pkg-config"
  link openblas-pthread/libopenblas.so "$libraries/libopenblas.so"
  link ../openblas-pthread/pkgconfig/openblas.pc "$libraries/pkgconfig/openblas.pc"
  for kind in mpi mpi-c ompi ompi-c; do
    if [ -e "$libraries/openmpi/lib/pkgconfig/$kind.pc" ]; then
      link "../openmpi/lib/pkgconfig/$kind.pc" "$libraries/pkgconfig/$kind.pc"
    fi
  done
fi
while IFS= read -r file; do
  install -D -m 644 "$(readlink -f "$file")" "$top/host/${file##*/}/${file##*/}"
done < <(find "$stage/host" -regex '.*/lib\(stdc\+\+\|gcc_s\|gomp\|gfortran\|quadmath\|z\|udev\)\.so\.[0-9]+')
# Plugins and libraries for missing interconnects would only cause warnings.
cp "$here/packages.list" "$top/"
touch "$top/MANIFEST"
while :; do
  unmet=$(
    # shellcheck source=env.sh
    . "$top/env.sh"
    find "$libraries" -type f -name '*.so*' | while IFS= read -r file; do
      # Only the bundle's own folders and the C library count, because the host may lack other libraries of this machine.
      readelf -d "$file" 2> /dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | while IFS= read -r name; do
        case $name in
          libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1 | libutil.so.1 | libresolv.so.2 | ld-linux-x86-64.so.2) continue ;;
        esac
        [ -e "$libraries/$name" ] || [ -e "$libraries/pmix2/lib/$name" ] || [ -e "$top/host/$name" ] || { echo "$file"; break; }
      done
    done
  )
  [ -n "$unmet" ] || break
  while IFS= read -r file; do
    rm "$file"
    echo "left out, since it asks for what is not carried: ${file#"$libraries"/}"
  done <<< "$unmet"
  find "$top/deps" -xtype l -delete
done
find "$top/deps" -xtype l -delete
find "$top/deps" -type d -empty -delete
for file in "${opened[@]}"; do
  [ -e "$top/deps$file" ] || [ -e "$top/deps/usr$file" ] || fail "${file##*/} was left out, and programs open it by name: see the lines above" 1
done

echo "== MANIFEST"
needed() {  # PREFIX: the newest symbol version with this prefix that an ELF file needs
  find "$top/bin" "$top/tests" "$libraries" "$usr/bin" -type f \( -perm -u+x -o -name '*.so*' \) -exec objdump -T {} + 2> /dev/null |
    grep -o "$1_[0-9.]*" | sed "s/$1_//" | sort -uV | tail -n 1
}
commit=$(git -C "$root" rev-parse HEAD 2> /dev/null || echo unknown)
[ -z "$(git -C "$root" status --porcelain 2> /dev/null | head -n 1)" ] || commit="$commit with changes"
date=$(git -C "$root" log -1 --format=%cI 2> /dev/null || echo unknown)
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt" | head -n 1; }
{
  echo "tranche-gpu-bundle: 1"
  echo "commit: $commit"
  echo "date: $date"
  echo "version: $(told version)"
  echo "build: $(told build_type), $(told compiler)"
  echo "cuda: runtime $(told cuda.runtime_version)"
  capabilities=$(grep -oh 'arch=compute_[0-9]*' "$build/build.ninja" 2> /dev/null | sed 's/.*_\([0-9]*\)\([0-9]\)/\1.\2/' | sort -uV || true)
  echo "needs-compute-capability: $(head -n 1 <<< "$capabilities")"
  echo "compute-capabilities: $(paste -sd ' ' <<< "$capabilities") and newer"
  echo "nccl: $(told nccl)"
  echo "mpi: $(told mpi | sed 's/not compiled//')"
  echo "hdf5: $(told hdf5)"
  echo "needs-glibc: $(needed GLIBC)"
  echo "needs-glibcxx: $(needed GLIBCXX)"
  # shellcheck disable=SC2086
  readelf -d $elfs | sed -n 's/.*(NEEDED).*\[\(lib\(cu\|nccl\|nv\)[^]]*\)\]/needs-cuda-library: \1/p' | sort -u
  printf 'package: %s\n' "${packages[@]}" | sort -u
} > "$top/MANIFEST"
rm "$top/packages.list"

echo "== $out"
"$here/pack.sh" "$top" "$out" "$budget"
echo "commit $commit"
