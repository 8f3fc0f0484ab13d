{{/* Most templates take (dict "root" $ "service" "verifier"). */}}

{{- define "draftwire.ownName" -}}
{{ .Values.nameOverride | default "draftwire" }}
{{- end }}

{{/* The beginning of names of the objects of a release. The names of pods, which end with numbers, have at most 63
characters. */}}
{{- define "draftwire.releaseName" -}}
{{- $own := include "draftwire.ownName" . -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $own) (contains $own .Release.Name) -}}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The same of the objects of one of its targets. */}}
{{- define "draftwire.fullname" -}}
{{- $name := include "draftwire.releaseName" . -}}
{{- if .target -}}
{{- printf "%s-%s" (trunc (sub 39 (len .target) | int) $name | trimSuffix "-") .target -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{- define "draftwire.name" -}}
{{ include "draftwire.fullname" .root }}-{{ .service }}
{{- end }}

{{/* The LeaderWorkerSet needs a different name: its controller creates a Service of that name, for all pods of a group
before they are ready, and would use ours, which has leaders only, instead. */}}
{{- define "draftwire.groupName" -}}
{{ include "draftwire.fullname" . }}-verifier-group
{{- end }}

{{- define "draftwire.selector" -}}
app.kubernetes.io/name: {{ include "draftwire.ownName" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ with .root.target }}{{ . }}-{{ end }}{{ .service }}
{{- end }}

{{- define "draftwire.ownLabels" -}}
{{ include "draftwire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "draftwire.labels" -}}
{{ include "draftwire.ownLabels" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* torch for GPUs is in images of another tag. A gateway has no torch, and its image both tags. */}}
{{- define "draftwire.image" -}}
{{- with .root.Values.image -}}
{{- $repository := print .registry (empty .registry | ternary "" "/") "draftwire-" $.service -}}
{{- $tag := .tag | default $.root.Chart.AppVersion -}}
{{- if and (eq (get (index $.root.Values $.service) "device") "cuda") (not (hasSuffix .cudaSuffix $tag)) -}}
{{- $tag = print $tag .cudaSuffix -}}
{{- end -}}
{{ get .repositories $.service | default $repository }}:{{ get .tags $.service | default $tag }}
{{- with get .digests $.service }}@{{ . }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "draftwire.port" -}}
{{ get (dict "gateway" 50051 "verifier" 50052 "drafter" 50053) .service }}
{{- end }}

{{- define "draftwire.metricsPort" -}}
{{ get (dict "gateway" 9051 "verifier" 9052 "drafter" 9053) .service }}
{{- end }}

{{- define "draftwire.tlsSecret" -}}
{{ get .root.Values.tls.secrets .service | default (printf "%s-tls" (include "draftwire.name" .)) }}
{{- end }}

{{/* Number of processes, and GPUs, per pod. */}}
{{- define "draftwire.ranks" -}}
{{- if eq .service "verifier" -}}
{{ with .root.Values.verifier.tensorParallel }}{{ div .size .nodes }}{{ end }}
{{- else if eq .service "drafter" -}}
{{ .root.Values.drafter.layerParallel.ranks }}
{{- else -}}
1
{{- end -}}
{{- end }}

{{- define "draftwire.drafterReplicas" -}}
{{- with .Values -}}
{{- $wanted := ceil (mulf .verifier.replicas .drafter.perVerifier) | int -}}
{{ kindIs "invalid" .drafter.replicas | ternary $wanted .drafter.replicas }}
{{- end -}}
{{- end }}

{{/* The least that a pod needs after SIGTERM is to be sent: ranks are released after the drain, 10 s for the current step
and 6 s to end. */}}
{{- define "draftwire.leastGraceSeconds" -}}
{{- $values := index .root.Values .service -}}
{{ add (ceil $values.drainSeconds) ($values.preStopSeconds | default 0) 30 }}
{{- end }}

{{/* The gateway waits for the first verifier, and for the drafters known by then. */}}
{{- define "draftwire.startupSeconds" -}}
{{- with .root.Values -}}
{{- if eq $.service "gateway" -}}
{{ add .verifier.startupSeconds .drafter.startupSeconds 60 }}
{{- else -}}
{{ get (index $.root.Values $.service) "startupSeconds" }}
{{- end -}}
{{- end -}}
{{- end }}
