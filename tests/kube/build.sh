#!/usr/bin/env bash
# Builds Kubernetes 1.20.2 (API server, controller manager, scheduler, kubelet) into one program, from the source
# package of Debian bookworm and with its Go 1.19; no Go proxy is asked. About 4 minutes on 2 idle cores, 2.5 GB.
#
# usage: build.sh FOLDER      the program is FOLDER/hyper
set -euo pipefail
out=$(realpath -m "$1")
here=$(cd "$(dirname "$0")" && pwd)
package=kubernetes=1.20.5+really1.20.2-1.1+deb12u1
mkdir -p "$out/lists/partial" "$out/home" "$out/source"

DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    golang-1.19-go dpkg-dev jq rsync make >/dev/null

# the machine's own mirror, source packages added, without touching its lists
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sort -u | grep -v security | head -1)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb-src [signed-by=$keyring] $mirror bookworm main" >"$out/sources.list"
apt=(-o "Dir::Etc::sourcelist=$out/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$out/lists")
apt-get "${apt[@]}" update -qq
(cd "$out/source" && apt-get "${apt[@]}" source --download-only -qq "$package")
rm -rf "$out/source/tree"
dpkg-source -x --no-check "$out"/source/kubernetes_*.dsc "$out/source/tree" >/dev/null
cd "$out/source/tree"

# Go 1.19 rejects the package's module files; as a GOPATH the tree builds
mkdir -p .go/src/k8s.io cmd/hyper
ln -sfn ../../.. .go/src/k8s.io/kubernetes
cp "$here/hyper.go" cmd/hyper/main.go
export PATH=/usr/lib/go-1.19/bin:$PATH HOME="$out/home" GOPATH="$PWD/.go" GOCACHE="$out/gocache"
export GOPROXY=off GOSUMDB=off GOFLAGS='' CGO_ENABLED=0
cat >"$out/version" <<'END'
KUBE_GIT_COMMIT='debian'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_VERSION='v1.20.2'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
END
KUBE_GIT_VERSION_FILE="$out/version" make generated_files >"$out/generate.log" 2>&1

flags='-s -w'
for at in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X k8s.io/kubernetes/vendor/$at.gitVersion=v1.20.2"
    flags+=" -X k8s.io/kubernetes/vendor/$at.gitMajor=1 -X k8s.io/kubernetes/vendor/$at.gitMinor=20"
    flags+=" -X k8s.io/kubernetes/vendor/$at.gitCommit=debian -X k8s.io/kubernetes/vendor/$at.gitTreeState=archive"
    flags+=" -X k8s.io/kubernetes/vendor/$at.buildDate=2021-01-13T00:00:00Z"
done
cd .go/src/k8s.io/kubernetes
GO111MODULE=off go build -tags 'providerless dockerless' -ldflags "$flags" -o "$out/hyper" \
    k8s.io/kubernetes/cmd/hyper
rm -rf "$out/source" "$out/gocache" "$out/lists" "$out/home"
