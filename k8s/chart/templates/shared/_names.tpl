{{/* Most templates take (dict "root" $ "service" "verifier"). */}}

{{- define "draftwire.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-draftwire" .Release.Name) (contains "draftwire" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
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
app.kubernetes.io/name: draftwire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end }}

{{- define "draftwire.labels" -}}
{{ include "draftwire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "draftwire.image" -}}
{{- with .root.Values.image -}}
{{- with .registry }}{{ . }}/{{ end -}}draftwire-{{ $.service }}:{{ .tag | default $.root.Chart.AppVersion }}
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
