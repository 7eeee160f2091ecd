#!/usr/bin/env bash
# Builds and installs Horovod for the interpreter $PYTHON. install.py shows its other variables.
set -euo pipefail

version=0.28.1
cache=${XDG_CACHE_HOME:-~/.cache}/dualdist/horovod
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf 'install-horovod: %s\n' "$*"; }
problem() { say "$*" >&2; problems=1; }
problems=0

# What is here? Every problem is told before the first one ends the run.
python=$PYTHON
command -v "${CXX:-c++}" >/dev/null || problem "no C++ compiler (${CXX:-c++}); install one: apt-get install g++"
command -v make >/dev/null || problem "no make; install it: apt-get install make"
if ! "$python" -m pip --version >/dev/null 2>&1; then
    problem "no pip in $python; install it: $python -m ensurepip"
elif ! "$python" >"$work/facts" 2>"$work/error" <<'EOF_PYTHON'
import pathlib, re, sys, sysconfig
import torch
cpp_extension = pathlib.Path(torch.__file__).parent / "utils" / "cpp_extension.py"
standard = max(map(int, re.findall(r"-std=c\+\+(\d\d)\b", cpp_extension.read_text())), default=17)
nccl = pathlib.Path(torch.__file__).parents[1] / "nvidia" / "nccl"
print(torch.__version__, torch.version.cuda, torch.cuda.is_available(), standard, nccl)
print("cp{}{}{}".format(*sys.version_info[:2], sys.abiflags), sysconfig.get_path("include"))
EOF_PYTHON
then
    problem "no torch in $python ($(tail -1 "$work/error")); install it: $python -m pip install torch"
else
    { read -r torch cuda gpu standard torch_nccl; read -r tag include; } <"$work/facts"
    [[ -e $include/Python.h ]] || problem "no Python headers in $include; install them: apt-get install python3-dev"
fi
mpi=nompi
if [[ ${HOROVOD_WITHOUT_MPI:-} == 1 ]]; then
    say "without MPI: HOROVOD_WITHOUT_MPI=1"
elif ! printf '#include <mpi.h>\n@ OMPI_MAJOR_VERSION.OMPI_MINOR_VERSION.OMPI_RELEASE_VERSION MPICH_VERSION\n' |
    mpicxx -E -x c++ - >"$work/mpi" 2>/dev/null; then
    problem "no MPI compiler with headers (mpicxx, mpi.h); install them: apt-get install openmpi-bin libopenmpi-dev, or set HOROVOD_WITHOUT_MPI=1"
else
    mpi=$(sed -n 's/[" ]//g; s/^@\([0-9].*\)MPICH_VERSION$/openmpi\1/p; s/^@OMPI.*VERSION\([0-9].*\)/mpich\1/p' "$work/mpi")
    say "with MPI: $(command -v mpicxx) is of ${mpi:=mpi}"
fi
if [[ -n ${HOROVOD_SOURCE:-} ]] && ! tar -tzf "$HOROVOD_SOURCE" "horovod-$version/setup.py" >/dev/null 2>&1; then
    problem "HOROVOD_SOURCE=$HOROVOD_SOURCE is not the source distribution of Horovod $version; set it to the path of horovod-$version.tar.gz"
fi
[[ $problems == 0 ]] || exit 1
say "C++$standard: torch $torch compiles its own extensions with it"

# CPU or NCCL operations? NCCL needs a CUDA build of torch, a toolkit that can build a program, and NCCL.
home=
for folder in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}" /usr/local/cuda "$(dirname "$(command -v nvcc || echo /usr/bin/nvcc)")/.."; do
    if [[ -z $home && -x $folder/bin/nvcc ]]; then home=$folder; fi
done
nccl=
for folder in "${HOROVOD_NCCL_HOME:-}" "$torch_nccl" "$home" /usr; do
    if [[ -z $nccl && -e $folder/include/nccl.h ]]; then nccl=$folder; fi
done
printf '#include <cuda_runtime.h>\nint main() { return cudaDeviceSynchronize(); }\n' >"$work/probe.cu"
operations=cpu
if [[ $cuda == None ]]; then
    say "CPU operations: torch $torch is not a CUDA build"
elif [[ $gpu == False && ${HOROVOD_GPU_OPERATIONS:-} != NCCL ]]; then
    say "CPU operations: torch sees no GPU (to build for one elsewhere: HOROVOD_GPU_OPERATIONS=NCCL)"
elif [[ -z $home ]] || ! "$home/bin/nvcc" -o "$work/probe" "$work/probe.cu" >/dev/null 2>&1; then
    say "CPU operations: no complete CUDA toolkit (nvcc, headers and cudart) in ${home:-HOROVOD_CUDA_HOME, CUDA_HOME or PATH}"
elif [[ -z $nccl ]]; then
    say "CPU operations: no nccl.h in HOROVOD_NCCL_HOME, beside torch, or in $home"
else
    say "NCCL operations: torch is built for CUDA $cuda, the toolkit is $home, NCCL is $nccl"
    operations=nccl
fi

# patch, and a number that grows with each change of the repairs. dualdist/horovod/group.py reads it.
label=torch${torch/+/.}.$mpi.$operations.patch5
wheel=$(compgen -G "$cache/horovod-$version+$label-$tag-*.whl" || true)
installed=$("$python" -c 'import importlib.metadata as m; print(m.version("horovod"))' 2>/dev/null || true)
if [[ $installed == "$version+$label" ]]; then
    say "already installed: Horovod $installed"
elif [[ -n $wheel ]]; then
    say "built before: $wheel"
else
    say "building Horovod $version+$label, a few minutes; the log is $cache/build.log"
    mkdir -p "$cache"
    [[ -n ${HOROVOD_SOURCE:-} ]] ||
        "$python" -m pip download --quiet --no-deps --no-binary horovod --dest "$work" "horovod==$version"
    tar -xzf "${HOROVOD_SOURCE:-$work/horovod-$version.tar.gz}" -C "$work"
    source=$work/horovod-$version
    export HOROVOD_LOCAL_VERSION=$label HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
    # The bundled Gloo is older than GCC 13, which asks for <cstdint>, and than CMake 4, which asks for this policy.
    export CXXFLAGS="${CXXFLAGS:-} -include cstdint" CMAKE_POLICY_VERSION_MINIMUM=3.5
    [[ $mpi == nompi ]] || export HOROVOD_WITH_MPI=1
    tools=(setuptools wheel cloudpickle psutil pyyaml packaging cffi)
    command -v cmake >/dev/null || { say "no cmake in PATH: taking one from the package index for this build"; tools+=(cmake); }
    "$python" -m pip install --quiet --target "$work/tools" "${tools[@]}"
    export PYTHONPATH=$work/tools PATH=$PATH:$work/tools/bin
    sed -i "s/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD $standard/" "$source"/{,horovod/torch/}CMakeLists.txt
    # Process sets, the global one among them, ignore HOROVOD_GLOO_IFACE and take the address of the host's name.
    sed -i '/^void GlooContext::InitializeForProcessSet/,/^}/ s/^  attr device_attr;/  gloo_iface_ = global_context.gloo_iface_;\n&/' \
        "$source/horovod/common/gloo/gloo_context.cc"
    # They choose whom a rank connects to on other hosts by its number on its host, but name the connection by its number
    # among the set's ranks there. Where the two differ, a rank waits for ever for one that it does not know.
    sed -i '/^void GlooContext::InitializeForProcessSet/,/^}/ s/std::to_string(local_rank) + process_set_suffix/std::to_string(global_context.local_ctx->rank) + process_set_suffix/' \
        "$source/horovod/common/gloo/gloo_context.cc"
    # A start that waits for an unreachable rank must not stop all threads of Python.
    sed -i 's/&\(Do[A-Za-z]*\));/\&\1, py::call_guard<py::gil_scoped_release>());/' "$source/horovod/torch/mpi_ops_v2.cc"
    # In each cycle, the ranks tell each other which process sets they have. A rank that waits for the others meanwhile must
    # not hold the mutex that every new operation needs: the operations of a rank that comes late would wait for many cycles.
    sed -i '/^int32_t ProcessSetTable::InitializeRegisteredAndRemoveMarkedIfReady_/,/^}/ {
        s/std::lock_guard<std::recursive_mutex> guard(mutex);/std::unique_lock<std::recursive_mutex> guard(mutex);\n  const auto ids = Ids();/
        s/ids_\.size()/ids.size()/
        s/^  global_controller\.Allgather2Ints(.*/  guard.unlock();\n&\n  guard.lock();/
        s/auto id : Ids()/auto id : ids/
        s/id_to_be_removed_\( == [A-Z_]*REMOVAL\)/pair_to_transmit[1]\1/
        s/other_marked_id != id_to_be_removed_/other_marked_id != pair_to_transmit[1]/
    }' "$source/horovod/common/process_set.cc"
    # Exchange process sets in every tenth cycle only: an exchange in every cycle made a step of a small CNN 16 to 64 % longer
    # on two cores. Each rank counts its own cycles, and all must exchange in the same one, so all ranks need this repair.
    sed -i '/^  std::atomic_bool dynamic_process_sets{false};/a\  unsigned cycles_with_process_sets{0};' "$source/horovod/common/global_state.h"
    sed -i 's/^  state\.dynamic_process_sets =$/  state.cycles_with_process_sets = 0;\n&/
        s/^  if (state\.dynamic_process_sets) {$/  if (state.dynamic_process_sets \&\& state.cycles_with_process_sets++ % 10 == 0) {/' \
        "$source/horovod/common/operations.cc"
    # A second init() writes the default of a setting that HOROVOD_CYCLE_TIME or HOROVOD_FUSION_THRESHOLD has fixed behind
    # the end of the settings that are not: a segmentation fault.
    sed -i '/BayesianParameter::SetValue/,/^}/ s/^  } else {$/  } else if (fixed_values_.find(variable) == fixed_values_.end()) {/' \
        "$source/horovod/common/parameter_manager.cc"
    for repaired in 'gloo_iface_ = global_context.gloo_iface_' 'global_context.local_ctx->rank) + process_set_suffix' \
        'py::call_guard<py::gil_scoped_release>' '(int)ids.size()' guard.unlock guard.lock 'auto id : ids)' \
        'other_marked_id != pair_to_transmit[1]' 'pair_to_transmit[1] == NO_PENDING' 'pair_to_transmit[1] == SUCCESSFUL' \
        'cycles_with_process_sets{0}' 'cycles_with_process_sets = 0' 'cycles_with_process_sets++ % 10' '} else if (fixed_values_.find(variable)'; do
        grep --quiet --recursive --fixed-strings "$repaired" "$source/horovod/common" "$source/horovod/torch/mpi_ops_v2.cc" ||
            { say "cannot repair this source of Horovod: '$repaired' was not put in"; exit 1; }
    done
    # Debug symbols would make the build half as long again and the wheel ten times as large.
    sed -i 's/"-O2" "-O3"/"-O2 -g" "-O3"/' "$source/CMakeLists.txt"
    # Python 3.12 has no distutils.
    sed -i 's/from distutils.sysconfig import get_python_inc; print(get_python_inc())/import sysconfig; print(sysconfig.get_path(\\"include\\"))/' "$source/horovod/torch/CMakeLists.txt"
    sed -i 's/from distutils.spawn import find_executable/from shutil import which as find_executable/' "$source/horovod/runner/js_run.py"
    if [[ $operations == nccl ]]; then
        # NCCL beside torch has no libnccl.so, and a link to it in $work would stay in the library's search path.
        sed -i 's/set(NCCL_LIBNAME "nccl")/set(NCCL_LIBNAME "libnccl.so.2")/' "$source/cmake/Modules/FindNCCL.cmake"
        sed -i 's/CMAKE_CUDA_STANDARD 11/CMAKE_CUDA_STANDARD 17/' "$source/horovod/common/ops/cuda/CMakeLists.txt"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$nccl HOROVOD_NCCL_LINK=shared
        # Horovod asks the first nvcc in PATH which GPUs to build for, whichever compiles.
        export HOROVOD_CUDA_HOME=$home CUDA_HOME=$home PATH=$home/bin:$PATH
    else
        # A CUDA build of torch and an nvcc that cannot link would make CMake try all the same.
        sed -i '/^check_language(CUDA)/d; /^    find_package(CUDAToolkit)/d' "$source/CMakeLists.txt"
        sed -i 's/(torch.version.cuda is not None)/False/' "$source/cmake/Modules/FindPytorch.cmake"
        export HOROVOD_WITHOUT_NVTX=1
        unset HOROVOD_GPU_OPERATIONS HOROVOD_CUDA_HOME
    fi
    if ! "$python" -m pip wheel --verbose --no-cache-dir --no-deps --no-build-isolation --wheel-dir "$work/wheel" "$source" >"$cache/build.log" 2>&1; then
        grep -E -m 5 "(error:|Error)" "$cache/build.log" >&2 || tail -5 "$cache/build.log" >&2
        say "the build failed; its log is $cache/build.log" >&2
        exit 1
    fi
    wheel=$cache/$(basename "$work"/wheel/horovod-*.whl)
    cp "$work"/wheel/horovod-*.whl "$work/wheel.part" && mv "$work/wheel.part" "$wheel"
    unset PYTHONPATH
fi
[[ $installed == "$version+$label" ]] || "$python" -m pip install --quiet "$wheel"
"$python" -c 'from horovod.runner.launch import run_commandline; run_commandline()' --check-build
